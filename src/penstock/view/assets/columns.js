// Where blocks are too narrow to be seen one by one, columns of time show the exact shares of what runs in each.

/** Below this mean width of the blocks, in pixels, single blocks are no longer drawn. */
const READABLE = 3;

/** From this mean width on, there are gaps between blocks. */
const SPACED = 5;

/** Blocks wider than this many pixels, and than two columns, are still drawn individually. */
const NARROW = 2;

/** How much time a column takes. */
function sliceOf(layout, density, { meanBlock, period }) {
  if (!(meanBlock * layout.scale < READABLE)) return 1 / (density * layout.scale);
  // Whole periods: where the work repeats, all columns are equal, and no false pattern appears.
  const width = period * layout.scale;
  return width < 4 ? Math.ceil(4 / width) * period : period / Math.max(Math.round(width / 10), 1);
}

/** The columns of a row; they begin at time 0, so that they move with what is in them. */
class Columns {
  constructor({ layout, density }, timeline, kinds) {
    this.layout = layout;
    this.density = density;
    this.kinds = kinds;
    this.slice = sliceOf(layout, density, timeline);
    this.spaced = timeline.meanBlock * layout.scale >= SPACED;
    this.until = timeline.makespan;
    this.narrow = Math.max(NARROW / layout.scale, 2 * this.slice);
    this.origin = this.onPixel(layout.x(0));
    this.first = this.columnAt(layout.time(layout.left - 4));
    this.count = this.columnAt(layout.time(layout.width)) - this.first + 1;
    this.from = this.first * this.slice;
    this.to = this.from + this.count * this.slice;
    this.shares = null;
  }

  onPixel(x) {
    return Math.round(x * this.density) / this.density;
  }

  columnAt(time) {
    return Math.floor(time / this.slice);
  }

  /** The position of a time, rounded to a device pixel. */
  x(time) {
    return this.origin + this.onPixel(time * this.layout.scale);
  }

  /** When a column begins; the last one ends with the timeline. */
  begin(column) {
    const time = column * this.slice;
    return time - this.slice < this.until ? Math.min(time, this.until) : time;
  }

  edge(column) {
    return this.x(this.begin(column));
  }

  /** Call back for each interval in these columns, in order, with whether it is narrow. */
  each({ start, end, begin, stop }, visit) {
    let place = Math.max(firstAbove(start, this.from, begin, stop) - 1, begin);
    for (; place < stop && start[place] < this.to; place++) visit(place, end[place] - start[place] < this.narrow);
  }

  /** Add up the narrow intervals. */
  gather(intervals) {
    const { start, end, kindOf } = intervals;
    this.each(intervals, (place, isNarrow) => {
      if (!isNarrow) return;
      const last = this.columnAt(end[place]);
      for (let column = this.columnAt(start[place]); column <= last; column++) this.add(column, kindOf(place), start[place], end[place]);
    });
  }

  add(column, kind, start, end) {
    const [from, to] = [this.begin(column), this.begin(column + 1)];
    const time = Math.min(end, to) - Math.max(start, from);
    if (time < 1e-9 * this.slice || column < this.first || column >= this.first + this.count) return;
    this.shares ??= new Float64Array(this.count * this.kinds);
    this.used ??= new Uint8Array(this.count);
    this.shares[(column - this.first) * this.kinds + kind] += time / (to - from);
    this.used[column - this.first] = 1;
  }

  isUsed(column) {
    return this.used !== undefined && this.used[column - this.first] === 1;
  }

  /** Draw the wide intervals; the parts of their ends that fall into a used column are added to its shares. */
  drawWide(intervals, draw) {
    const { start, end, kindOf } = intervals;
    this.each(intervals, (place, isNarrow) => {
      if (isNarrow) return;
      for (const column of [this.columnAt(start[place]), this.columnAt(end[place])]) {
        if (this.isUsed(column)) this.add(column, kindOf(place), start[place], end[place]);
      }
      const [left, width] = this.part(start[place], end[place]);
      if (width > 0) draw(place, left, width);
    });
  }

  /** The part of an interval that is in view and not in columns: where it begins, and how wide it is. */
  part(start, end) {
    const [first, last] = [this.columnAt(start), this.columnAt(end)];
    const left = this.isUsed(first) ? this.edge(first + 1) : this.x(start);
    const right = this.isUsed(last) ? this.edge(last) : this.x(end);
    const seen = Math.max(left, this.layout.left - 4);
    return [seen, Math.max(Math.min(right, this.layout.width) - seen, 0)];
  }

  /** Call back for each used column that intersects an interval. */
  eachUsed(start, end, visit) {
    if (!this.used) return;
    const last = Math.min(this.columnAt(end), this.first + this.count - 1);
    for (let column = Math.max(this.columnAt(start), this.first); column <= last; column++) if (this.isUsed(column)) visit(column);
  }

  /** The parts of a column from the bottom, always in the same order: the kind, and where it begins and ends, from 0 to 1. */
  stack(column, draw) {
    let sum = 0;
    for (let kind = 0; kind < this.kinds; kind++) {
      const share = this.shares[(column - this.first) * this.kinds + kind];
      if (share) draw(kind, sum, Math.min((sum += share), 1));
    }
  }
}

function drawColumn({ context, layout, brushes, drawn }, row, styles, column) {
  const { columns } = row;
  const left = columns.edge(column);
  const width = columns.edge(column + 1) - left;
  const height = (share) => columns.onPixel(layout.bar * (1 - share));
  columns.stack(column, (kind, from, to) => {
    const isStyle = kind < styles.length;
    context.fillStyle = isStyle ? styles[kind].colour : brushes.patterns[kind - styles.length];
    context.fillRect(left, row.top + height(to), width, height(from) - height(to));
    drawn[isStyle ? "blocks" : "waits"]++;
  });
}
