"""Programs that others wrote, run with the timer and without."""
