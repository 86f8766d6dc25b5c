"""What a schedule is: actions, where stages are, what waits for what, and the forms it is written in."""
