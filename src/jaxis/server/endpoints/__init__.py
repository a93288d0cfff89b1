"""What each endpoint makes of a request, and of its outputs."""
