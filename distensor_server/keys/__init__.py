"""This machine's key for its hub: where it may come from, where it is kept, whether the hub takes it.

Today's hub gives a one-time join token (`dtj_...`); that is the key. No module here logs, prints or shows one.
"""
