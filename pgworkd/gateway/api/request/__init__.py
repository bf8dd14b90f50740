"""What each request goes through, whatever its route.

bounds    which host, from where, how large a head; the path          access    who calls, and whether they may
bodies    JSON read strictly, payloads as the text they are           answers   the same on the way back
problems  every error that a caller can get                           gateway   what routes share: the database, waiters
"""
