"""The compiled kernels of the search: they evaluate and improve orders by the thousand."""
