"""Payload: what of a bucket moves, all elements or those that changed, and how it is encoded.

`transport` has the interface of what moves it.
"""
