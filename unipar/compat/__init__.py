"""Drop-in faces of other frameworks: a script changes an import, and runs under any strategy.

A face has its framework's names and rules, made of :class:`unipar.Session`, and imports nothing of
the framework. What cannot be kept is an error where it is called or imported.
"""
