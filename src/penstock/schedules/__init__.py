"""Every known schedule as a pure function of its sizes, and a registry of them by name."""
