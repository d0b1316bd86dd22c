"""`algorithm=discover`: a language model proposes programs, a verifier that cannot be talked to scores them."""
