"""The workers of tests/clients/ before `pgworkd conformance`."""
