"""What /v1/responses and /v1/conversations keep from one request to the next."""
