"""The command line's questions for programs: JSON over HTTP at /api/NAME, and tools of an agent (`plumbline mcp`).

questions    a question and its values -> the answer's JSON
openapi    the description of it all, from the plans' own fields
routes    the addresses, and complaints as application/problem+json
mcp    the same questions as tools of the Model Context Protocol, over standard input and output
"""
