"""What late updates would win in a run that waits for every one, and their knobs where it may have late ones.

first steps -> what they show (measured) -> the planner (planned) -> a sentence, or other knobs (following)
"""
