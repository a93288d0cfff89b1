"""The experts that a mixture of experts chooses for each token, for requests that ask for them."""
