"""Run untrusted programs within limits: `contained` is this side; `warden` and `inside` are scripts of the other."""
