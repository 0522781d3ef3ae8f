"""JSON over HTTP: the command line's questions at /api/NAME, by the names and values of a link or in a JSON body.

questions    a question and its values -> the answer's JSON
openapi    the description of it all, from the plans' own fields
routes    the addresses, and complaints as application/problem+json
"""
