"""A gateway: the fleet over HTTP, for callers in any language, and for their workers."""
