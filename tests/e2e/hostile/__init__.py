"""Clients, engines and files that misbehave: a package, so that its files may be named as those beside it."""
