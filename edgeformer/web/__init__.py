"""Publishing: a bundle becomes a static page that runs and measures it in any browser."""
