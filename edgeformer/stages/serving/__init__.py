"""serve: a bundle answers over HTTP. The engine that makes batches knows nothing of HTTP."""
