"""pgworkd: an asyncio worker daemon for Postgres. Insert a row, it runs."""
