"""Dead jobs by their errors: alerts at once, and the digest; a sibling of the engine, which never imports it."""
