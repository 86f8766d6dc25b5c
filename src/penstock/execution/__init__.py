"""Runs actions: programs, operations, links, specs and the wire format. torch starts here."""
