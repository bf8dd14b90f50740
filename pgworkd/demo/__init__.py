"""`pgworkd demo`: an embedded Postgres, a daemon and real work, in one command."""
