"""Tries all orders of a tiny problem: an oracle for searches, which shares no code with them or with the simulator."""

from itertools import permutations, product

from penstock.planning.orders import Order

F, I, W, B = range(4)  # noqa: E741 - the letters of the schedule language


def all_rows(problem, stages):
    """Yield every order of the actions of a rank in which the microbatches of a stage take turns."""
    options = []
    for stage in stages:
        of_stage = set()
        for choice in product((True, False) if problem.splits[stage] else (False,), repeat=problem.microbatches):
            actions = [(F, number) for number in range(problem.microbatches)]
            for number, is_split in enumerate(choice):
                actions += [(I, number), (W, number)] if is_split else [(B, number)]
            of_stage.update(_extensions(frozenset(actions), ()))
        options.append([[(stage, *action) for action in row] for row in sorted(of_stage)])
    for chosen in product(*options):
        yield from _merged([tuple(row) for row in chosen])


def _extensions(left, row):
    if not left:
        yield row
    for kind, number in left:
        if kind == F:
            ahead = {(F, earlier) for earlier in range(number)}
        else:
            ahead = {
                (F, number),
                *((I, earlier) for earlier in range(number)),
                *((B, earlier) for earlier in range(number)),
            }
            if kind == W:
                ahead = {(I, number), *((W, earlier) for earlier in range(number))}
        if not ahead & left:
            yield from _extensions(left - {(kind, number)}, (*row, (kind, number)))


def _merged(rows):
    if not any(rows):
        yield ()
    for place, row in enumerate(rows):
        if row:
            for rest in _merged([*rows[:place], row[1:], *rows[place + 1 :]]):
                yield (row[0], *rest)


def run(problem, rows, begins=None):
    """Return the first start and last end of each rank, or None if the rows deadlock or exceed the memory.

    With ``begins``, only what follows the first action of that rank counts; the end is None if nothing does.
    """
    times = [problem.forward, problem.input, problem.weight, problem.whole]
    ends, at, now = {}, [0] * len(rows), [None] * len(rows)
    firsts = [None] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                stage, kind, number = row[at[rank]]
                arrivals = _arrivals(problem, ends, stage, kind, number)
                if arrivals is None:
                    break
                if at[rank]:
                    arrivals.append(None if now[rank] is None else now[rank] + problem.dispatch)
                elif begins in (None, rank):
                    arrivals.append(problem.dispatch)
                known = [arrival for arrival in arrivals if arrival is not None]
                start = max(known) if known else None
                firsts[rank] = start if at[rank] == 0 else firsts[rank]
                now[rank] = ends[stage, kind, number] = None if start is None else start + times[kind][stage]
                at[rank] += 1
                moved = True
    return None if any(at[rank] < len(row) for rank, row in enumerate(rows)) else (firsts, now)


def _arrivals(problem, ends, stage, kind, number):
    """Return when the inputs of an action arrive, or None if one has not run yet."""
    awaited = []
    if kind == F:
        inputs, kinds = problem.forward_inputs, (F,)
    elif kind == W:
        return [ends[stage, I, number]]
    else:
        inputs, kinds = problem.backward_inputs, (I, B)
        awaited.append(((stage, F, number), 0))
    for entry in range(inputs.first[stage], inputs.first[stage + 1]):
        found = [each for each in kinds if (inputs.stage[entry], each, number) in ends]
        if not found:
            return None
        awaited.append(((inputs.stage[entry], found[0], number), inputs.delay[entry]))
    return [None if ends[key] is None else ends[key] + delay for key, delay in awaited]


def fits(problem, rank, row):
    held = problem.static[rank]
    for stage, kind, _ in row:
        held += problem.activation[stage] if kind == F else 0
        if held > problem.memory_limit[rank] + 1e-9:
            return False
        held -= {F: 0, I: problem.input_release[stage], W: problem.weight_release[stage]}.get(
            kind, problem.activation[stage]
        )
    return True


def value(problem, rows, objective):
    """Return the value of an order, infinity if it deadlocks."""
    ran = run(problem, rows)
    if ran is None:
        return float("inf")
    firsts, ends = ran
    used = [rank for rank, row in enumerate(rows) if row]
    if objective == "makespan":
        return max(ends[rank] for rank in used) - min(firsts[rank] for rank in used)
    if objective == "span":
        return max(ends[rank] - firsts[rank] for rank in used)
    paths = {}
    for rank in used:
        firsts, ends = run(problem, rows, begins=rank)
        for other in used:
            if ends[other] is not None:
                stages = problem.placement.stages_of(other)
                optimizer = sum(problem.costs.per_stage("optimizer", problem.stages)[stage] for stage in stages)
                paths[rank, other] = ends[other] - firsts[rank] + optimizer + problem.dispatch
    means = []
    for length in range(1, len(used) + 1):
        for cycle in permutations(used, length):
            steps = list(zip(cycle, (*cycle[1:], cycle[0]), strict=True))
            if all(step in paths for step in steps):
                means.append(sum(paths[step] for step in steps) / length)
    return max(means)


def optimum(problem, objective):
    """Return the smallest value of any order that fits into the memory."""
    options = []
    for rank in range(problem.ranks):
        rows = all_rows(problem, problem.placement.stages_of(rank))
        options.append([row for row in dict.fromkeys(rows) if fits(problem, rank, row)])
    return min((value(problem, rows, objective) for rows in product(*options)), default=float("inf"))


def sequential(problem):
    """Return the order that runs one microbatch after the other: it always fits if anything does."""
    rows = []
    for rank in range(problem.ranks):
        stages = list(problem.placement.stages_of(rank))
        row = [4 * stage + F for stage in stages]
        for stage in reversed(stages):
            row += [4 * stage + I, 4 * stage + W] if problem.splits[stage] else [4 * stage + B]
        rows.append(row * problem.microbatches)
    return Order.from_rows(rows)
