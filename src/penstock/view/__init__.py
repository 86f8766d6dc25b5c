"""What a simulation looks like: a page, a trace, a chart, the terminal."""
