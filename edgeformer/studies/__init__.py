"""Several runs that make one table or figure: what is missing is trained, what is known is read."""
