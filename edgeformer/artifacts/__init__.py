"""What every file means, and how it is read and written."""
