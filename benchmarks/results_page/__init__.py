"""docs/results/: a page per topic from its template and the committed JSON, a page per study and per machine."""
