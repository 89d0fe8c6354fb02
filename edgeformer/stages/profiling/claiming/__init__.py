"""Claims: a report that another machine measures again."""
