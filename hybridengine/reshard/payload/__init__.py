"""Payload: which elements of a bucket move, all or those that changed, and their encoding.

`transport` has the interface of what moves it.
"""
