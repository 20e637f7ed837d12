"""Is it alive, is it ready?"""
