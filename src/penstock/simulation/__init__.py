"""What a schedule will take: time, memory, and where both go."""
