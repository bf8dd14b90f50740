"""`pgworkd conformance`: is a worker in another language right?"""
