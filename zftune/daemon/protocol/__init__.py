"""What an agent and the daemon tell each other: plain data as JSON, checked strictly on both sides.

`codec` reads and writes dataclasses; `messages` has those that travel.
"""
