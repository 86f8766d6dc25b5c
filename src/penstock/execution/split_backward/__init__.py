"""A backward in two halves: gradients of inputs first, those of weights later."""
