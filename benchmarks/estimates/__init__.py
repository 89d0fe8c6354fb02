"""How far estimates are from measurements: the models, the cases, what is held out, and the page that says so."""
