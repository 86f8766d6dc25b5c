// A timeline as arrays: which action is where, why it waited, what it depends on. No drawing here.

class Timeline {
  constructor(facts, number) {
    Object.assign(this, facts);
    this.number = number;
    const { first, start, end, style, step, posted, name } = facts.cells;
    this.count = start.length;
    this.first = Int32Array.from(first);
    this.start = Float64Array.from(start);
    this.end = Float64Array.from(end);
    this.style = Uint8Array.from(style);
    this.step = step && Int32Array.from(step);
    this.name = name;
    this.posted = new Uint8Array(this.count);
    for (const cell of posted) this.posted[cell] = 1;
    this.before = Int32Array.from(facts.edges.before);
    this.afterFirst = Int32Array.from(facts.edges.first);
    this.after = Int32Array.from(facts.edges.after);
    this.waits = withTimes(facts.waits);
    this.transfers = withTimes(facts.transfers);
    this.longestTransfer = longest(this.transfers);
    this.memory = facts.memory.map(({ time, value }) => ({ time: Float64Array.from(time), value: Float64Array.from(value) }));
    this.rank = new Int32Array(this.count);
    this.rows = Array.from({ length: facts.ranks }, (_, rank) => this.rowOf(rank));
    const busy = this.rows.map(({ blocks }) => lengthOf(blocks));
    const blocks = this.rows.reduce((sum, row) => sum + row.blocks.cell.length, 0);
    this.labels = new Labels(this);
    this.meanBlock = busy.reduce((sum, time) => sum + time, 0) / blocks;
    this.period = paceOf(this.rows[0].blocks, facts.microbatches * facts.steps) || Math.max(...busy);
  }

  /** What a rank runs itself, in order: what takes time, and what takes none. */
  rowOf(rank) {
    const blocks = [];
    const marks = [];
    for (let cell = this.first[rank]; cell < this.first[rank + 1]; cell++) {
      this.rank[cell] = rank;
      if (!this.posted[cell]) (this.end[cell] > this.start[cell] ? blocks : marks).push(cell);
    }
    return { rank, blocks: this.sorted(blocks), marks: this.sorted(marks) };
  }

  sorted(cells) {
    const cell = Int32Array.from(cells);
    return { cell, start: Float64Array.from(cell, (one) => this.start[one]), end: Float64Array.from(cell, (one) => this.end[one]) };
  }

  /** The action that a rank runs at a time, or -1. */
  actionAt(rank, time) {
    const { cell, start, end } = this.rows[rank].blocks;
    const place = firstAbove(start, time) - 1;
    return place >= 0 && time < end[place] ? cell[place] : -1;
  }

  /** The action without a duration that is nearest to a time, within a reach, or -1. */
  markNear(rank, time, reach) {
    const { cell, start } = this.rows[rank].marks;
    const after = firstAbove(start, time);
    const near = [after - 1, after].filter((place) => place >= 0 && place < cell.length && Math.abs(start[place] - time) <= reach);
    near.sort((one, other) => Math.abs(start[one] - time) - Math.abs(start[other] - time));
    return near.length ? cell[near[0]] : -1;
  }

  /** The idle interval of a rank at a time, or -1. */
  waitAt(rank, time) {
    const { first, start, end } = this.waits;
    const place = firstAbove(start, time, first[rank], first[rank + 1]) - 1;
    return place >= first[rank] && time < end[place] ? place : -1;
  }

  /** The idle intervals right before an action, the earliest first. */
  waitsBefore(cell) {
    const rank = this.rank[cell];
    const { first, start, end } = this.waits;
    const least = 1e-9 * Math.max(this.makespan, Number.MIN_VALUE);
    const found = [];
    let reached = this.start[cell];
    let place = firstAbove(start, reached - least, first[rank], first[rank + 1]) - 1;
    for (; place >= first[rank] && Math.abs(end[place] - reached) <= least; place--) {
      found.unshift(place);
      reached = start[place];
    }
    return found;
  }

  memoryAt(rank, time) {
    const { time: times, value } = this.memory[rank];
    return value[Math.max(firstAbove(times, time) - 1, 0)];
  }

  /** The action that another waited for longest, skipping ends of steps. */
  awaited(cell) {
    let node = this.before[cell];
    while (node >= this.count) node = this.before[node];
    return node;
  }

  /** An action and the chain of what it waited for longest, from the start. */
  chain(cell) {
    const found = [];
    for (let node = cell; node >= 0; node = this.awaited(node)) found.push(node);
    return found.reverse();
  }

  /** What waits for an action directly, or only for its transfer or the end of its step. */
  dependents(cell) {
    const found = new Set();
    const reached = new Set([cell]);
    const open = [cell];
    while (open.length) {
      const node = open.pop();
      for (let edge = this.afterFirst[node]; edge < this.afterFirst[node + 1]; edge++) {
        const other = this.after[edge];
        if (reached.has(other)) continue;
        reached.add(other);
        if (other >= this.count || this.posted[other]) open.push(other);
        else found.add(other);
      }
    }
    return [...found].sort((one, other) => one - other);
  }

  idleByCause(causes) {
    const total = causes.map(() => 0);
    const { start, end, cause } = this.waits;
    for (let place = 0; place < start.length; place++) total[cause[place]] += end[place] - start[place];
    return total;
  }
}

function withTimes(facts) {
  return { ...facts, start: Float64Array.from(facts.start), end: Float64Array.from(facts.end) };
}

/** How long a rank takes for a microbatch, with its waits, from one to three quarters of its blocks. */
function paceOf({ start }, microbatches) {
  const each = start.length / microbatches;
  const [begin, end] = [Math.floor(microbatches / 4), Math.ceil((3 * microbatches) / 4) - 1];
  return end > begin && (start[Math.round(end * each)] - start[Math.round(begin * each)]) / (end - begin);
}

function lengthOf({ start, end }) {
  let sum = 0;
  for (let place = 0; place < start.length; place++) sum += end[place] - start[place];
  return sum;
}

function longest({ start, end }) {
  let most = 0;
  for (let place = 0; place < start.length; place++) most = Math.max(most, end[place] - start[place]);
  return most;
}
