"""Runs actions: programs, operations, edges, specs and the wire format. torch starts here."""
