"""docs/results.md from its template, docs/results.md.jinja, and the committed JSON: tables and figures in sentences."""
