"""How an action is run: programs, operations, edges, specs and the wire format. torch starts here."""
