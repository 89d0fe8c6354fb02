"""What training will take: memory and time. It imports the loop, which never imports it."""
