// Where everything is: the rows from top to bottom, time from left to right. Shared by drawing and pointing.

const AXIS = 30;
const TITLE = 34;
const GAP = 12;

class Layout {
  constructor(timelines) {
    this.timelines = timelines;
    this.width = 1;
    this.height = 1;
    const ends = timelines.flatMap((timeline) => [timeline.makespan, ...timeline.transfers.end.subarray(-1)]);
    this.until = Math.max(...ends) || 1;
    this.from = 0;
    this.to = 1;
    this.fit();
  }

  /** Lay the rows out for a size; they grow until they fill it, and shrink until they would be too small to read. `names` is how wide their names are. */
  resize(width, height, memory, names) {
    Object.assign(this, { width, height, memory });
    const ranks = this.timelines.reduce((sum, timeline) => sum + timeline.ranks, 0);
    const digits = String(Math.max(...this.timelines.map((timeline) => timeline.ranks)) - 1).length;
    this.left = Math.max((width < 640 ? 52 : 72) + 7 * digits, Math.ceil(names) + 20);
    this.right = width - 20;
    const several = this.timelines.length > 1;
    const free = height - AXIS - 8 - (several ? TITLE * this.timelines.length : 10);
    const pitch = clamp(Math.floor(free / ranks), memory ? 66 : 30, memory ? 132 : 64);
    this.bar = memory ? clamp(Math.round((pitch - GAP - 3) * 0.5), 24, 52) : pitch - GAP;
    this.curve = memory ? pitch - GAP - 3 - this.bar : 0;
    let top = AXIS + (several ? 0 : 10);
    this.rows = [];
    this.titles = [];
    for (const timeline of this.timelines) {
      if (several) this.titles.push({ timeline, top });
      top += several ? TITLE : 0;
      for (let rank = 0; rank < timeline.ranks; rank++, top += pitch) this.rows.push({ timeline, rank, top, curve: top + this.bar + 3 });
    }
    this.pitch = pitch;
    this.tall = top + 8;
  }

  /** The rows in view at a scroll position. */
  visible(scrolled) {
    return this.rows.filter((row) => row.top + this.pitch > scrolled + AXIS - 8 && row.top < scrolled + this.height);
  }

  rowOf(timeline, rank) {
    const first = this.rows.findIndex((row) => row.timeline === timeline);
    return this.rows[first + rank];
  }

  get scale() {
    return (this.right - this.left) / (this.to - this.from);
  }

  x(time) {
    return this.left + (time - this.from) * this.scale;
  }

  time(x) {
    return this.from + (x - this.left) / this.scale;
  }

  fit() {
    this.show(-0.005 * this.until, 1.01 * this.until);
  }

  /** Show these times, but never much beyond the timeline, nor at more precision than numbers have. */
  show(from, to) {
    const least = -0.02 * this.until;
    const most = 1.02 * this.until;
    const length = clamp(to - from, 1e-7 * this.until, most - least);
    this.from = clamp(from, least, most - length);
    this.to = this.from + length;
  }

  /** Zoom by a factor, keeping a time where it is. */
  zoom(factor, time = (this.from + this.to) / 2) {
    const length = clamp((this.to - this.from) / factor, 1e-7 * this.until, 1.04 * this.until);
    const from = time - ((time - this.from) / (this.to - this.from)) * length;
    this.show(from, from + length);
  }

  pan(time) {
    this.show(this.from + time, this.to + time);
  }
}
