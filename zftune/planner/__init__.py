"""The planner: step time, stall and memory of a setting before it is run, and the settings worth trying.

    from zftune.planner.choosing import choose, published_budget
    from zftune.planner.model import Job, Machine, ModelFacts
    from zftune.quality import assumed_coverage

    model, machine = ModelFacts.from_name("Llama-2-7B"), Machine.load("a100-40-sxm")
    best = choose(model, machine, Job(seq=2048), budget=published_budget(assumed_coverage))

Times follow from a closed form (what each resource has to do in a step) and from a simulation of the pipeline (what
waits for what).
"""
