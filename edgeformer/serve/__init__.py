"""HTTP server of a bundle (extra ``serve``): its queue, the routes of OpenAI's interface, and its page."""
