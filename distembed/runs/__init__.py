"""A run's folder: who is at work in it, what it records, and reports and plots of what it recorded."""
