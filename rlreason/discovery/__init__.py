"""`algorithm=discover`: a language model proposes programs, and an exact verifier scores them in a sandbox."""
