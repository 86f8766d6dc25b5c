// The page: what is shown and highlighted, and the frame that draws it.

class Page {
  constructor(facts) {
    Object.assign(this, { styles: facts.styles, causes: facts.causes, limit: facts.limit });
    this.timelines = facts.timelines.map((timeline, number) => new Timeline(timeline, number));
    this.layout = new Layout(this.timelines);
    this.brushes = new Brushes(this.causes);
    this.stage = document.getElementById("stage");
    this.canvas = document.getElementById("canvas");
    this.tooltip = document.getElementById("tooltip");
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.shown = { critical: false, transfers: true, memory: true, dark: false };
    this.hovered = this.selected = this.pointer = null;
    this.most = memoryScale(this.timelines, this.limit);
    this.paths = this.timelines.map((timeline) => timeline.chain(timeline.edges.last));
    this.widths = new Map();
    this.drawn = { frames: 0 };
    this.focus = new Focus(this);
    fillHeader(this);
    this.resize();
    listen(this);
  }

  /** Request a redraw; several requests before the next frame cause only one. */
  ask() {
    this.asked ??= requestAnimationFrame(() => {
      this.asked = null;
      this.draw();
    });
  }

  resize() {
    const width = this.stage.clientWidth;
    const height = this.stage.clientHeight;
    this.density = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * this.density);
    this.canvas.height = Math.round(height * this.density);
    this.canvas.style.height = `${height}px`;
    this.layout.resize(width, height, this.shown.memory, widestName(this.context, this.timelines));
    document.getElementById("tall").style.height = `${this.layout.tall}px`;
    this.refresh();
  }

  refresh() {
    this.brushes.refresh(this.context, this.density);
    paintSamples(this.brushes, this.density);
    this.ask();
  }

  /** How wide a text is in the font of the blocks. */
  widthOf(text) {
    if (!this.widths.has(text)) this.widths.set(text, this.context.measureText(text).width);
    return this.widths.get(text);
  }

  draw() {
    const began = performance.now();
    if (window.devicePixelRatio !== this.density) this.resize();
    const { context, layout, density } = this;
    this.scrolled = this.stage.scrollTop;
    this.drawn = { frames: this.drawn.frames + 1, blocks: 0, waits: 0, labels: 0, causes: 0, points: 0, transfers: 0 };
    context.setTransform(density, 0, 0, density, 0, 0);
    context.fillStyle = this.brushes.paper;
    context.fillRect(0, 0, layout.width, layout.height);
    const axis = ticksBetween(layout.from, layout.to, (layout.right - layout.left) / 80);
    drawGrid(this, axis.ticks);
    context.translate(0, -this.scrolled);
    this.drawRows();
    context.translate(0, this.scrolled);
    drawAxis(this, axis);
    if (this.pointer) drawPointer(this, this.pointer.x);
    this.focus.place();
    this.drawn.milliseconds = performance.now() - began;
  }

  drawRows() {
    const { context, layout, shown, selected } = this;
    const rows = layout.visible(this.scrolled);
    this.rows = new Map(rows.map((row) => [row.rank + row.timeline.number * 1e6, row]));
    const faded = selected || shown.critical ? 0.3 : 1;
    context.font = `11px ${FONT}`;
    for (const row of rows) {
      context.globalAlpha = faded;
      drawRow(this, row, this.styles);
      context.globalAlpha = 1;
      if (shown.memory) drawMemory(this, row, this.most, this.limit);
    }
    for (const timeline of shown.transfers ? this.timelines : []) {
      context.globalAlpha = faded;
      drawTransfers(this, timeline);
    }
    context.globalAlpha = 1;
    this.drawChains();
    drawEnds(this);
    drawNames(this, rows, this.limit);
    drawTitles(this);
  }

  drawChains() {
    const { shown, selected, brushes, styles } = this;
    if (shown.critical) this.timelines.forEach((timeline, number) => drawChain(this, timeline, this.paths[number], brushes.critical, styles));
    if (!selected) return;
    drawDependents(this, selected.timeline, selected.cell, selected.dependents, styles);
    drawChain(this, selected.timeline, selected.chain, brushes.ink, styles);
    drawRing(this, selected.timeline, selected.cell);
  }

  /** What is at a place of the canvas. */
  at(x, y) {
    const { layout } = this;
    const height = y + this.stage.scrollTop;
    const row = layout.rows.find((one) => height >= one.top - 7 && height < one.top + layout.pitch - 7);
    if (!row || y < AXIS || x < layout.left - 4) return null;
    const { timeline, rank } = row;
    const time = layout.time(x);
    const mark = height < row.top ? timeline.markNear(rank, time, 5 / layout.scale) : -1;
    if (mark >= 0) return { kind: "action", timeline, rank, cell: mark };
    if (time < 0 || time > timeline.makespan) return null;
    const cell = height >= row.top && height < row.top + layout.bar ? timeline.actionAt(rank, time) : -1;
    if (cell >= 0) return { kind: "action", timeline, rank, cell };
    const wait = height >= row.top && height < row.top + layout.bar ? timeline.waitAt(rank, time) : -1;
    if (wait >= 0) return { kind: "wait", timeline, rank, wait };
    const transfer = this.shown.transfers ? transferAt(layout, timeline, x, height, 4) : -1;
    if (transfer >= 0) return { kind: "transfer", timeline, rank, transfer };
    const under = layout.memory && height >= row.curve && height < row.curve + layout.curve;
    return under ? { kind: "memory", timeline, rank, time } : null;
  }

  point(event) {
    this.pointer = { x: event.offsetX, y: event.offsetY };
    this.hovered = this.at(this.pointer.x, this.pointer.y);
    this.canvas.classList.toggle("over-action", this.hovered?.kind === "action");
    if (this.hovered) showTooltip(this.tooltip, DESCRIPTIONS[this.hovered.kind](this.hovered, this), event.clientX, event.clientY);
    else this.tooltip.hidden = true;
  }

  leave() {
    this.hovered = this.pointer = null;
    this.tooltip.hidden = true;
    this.ask();
  }

  /** Close the tooltip, which describes the previous view. */
  closeTooltip() {
    this.hovered = null;
    this.tooltip.hidden = true;
  }

  click() {
    if (this.hovered?.kind === "action") this.select(this.hovered.timeline, this.hovered.cell);
    else this.clear();
  }

  select(timeline, cell) {
    this.selected = { timeline, cell, chain: timeline.chain(cell), dependents: timeline.dependents(cell) };
    this.say();
  }

  /** Select what the rank of the selected action runs next, and move it into view. */
  selectNext(direction) {
    const timeline = this.selected?.timeline ?? this.timelines[0];
    const { cell } = timeline.rows[this.selected ? timeline.rank[this.selected.cell] : 0].blocks;
    const place = this.selected ? nextPlace(cell, this.selected.cell, direction) : 0;
    if (place < 0 || place >= cell.length) return;
    this.select(timeline, cell[place]);
    const middle = (timeline.start[cell[place]] + timeline.end[cell[place]]) / 2;
    if (middle < this.layout.from || middle > this.layout.to) this.layout.pan(middle - (this.layout.from + this.layout.to) / 2);
  }

  clear() {
    this.selected = null;
    this.shown.critical = false;
    this.say();
  }

  say() {
    for (const name of ["critical", "transfers", "memory"]) document.getElementById(name).setAttribute("aria-pressed", this.shown[name]);
    document.getElementById("theme").setAttribute("aria-pressed", this.shown.dark);
    document.getElementById("status").textContent = statusWords({ selected: this.selected, critical: this.shown.critical }, this.timelines);
    this.ask();
  }

  toggle(name) {
    if (name === "dark") return this.setDark(!this.shown.dark);
    this.shown[name] = !this.shown[name];
    if (name === "memory") this.resize();
    return this.say();
  }

  setDark(dark) {
    this.shown.dark = dark;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    this.refresh();
    this.say();
  }

  pan(share) {
    this.layout.pan(share * (this.layout.to - this.layout.from));
    this.ask();
  }

  scroll(distance) {
    this.stage.scrollTop += distance;
  }

  zoom(factor) {
    this.layout.zoom(factor);
    this.ask();
  }

  fit() {
    this.layout.fit();
    this.ask();
  }
}

/** The index of the next or previous block; actions that take no time are between two blocks. */
function nextPlace(cell, selected, direction) {
  const place = cell.indexOf(selected);
  if (place >= 0) return place + direction;
  const after = cell.findIndex((other) => other > selected);
  return direction > 0 ? after : (after < 0 ? cell.length : after) - 1;
}

const page = new Page(JSON.parse(document.getElementById("facts").textContent));

// Read-only state for tests: the times in view; the action under the pointer and the selected one as [timeline, cell];
// the highlighted cells; what is switched on; what has the focus; how much the last frame drew and how long that took; the height of the
// bars; the column that a time of a rank is in; the position of the middle of an action in the window.
window.penstock = {
  get range() { return [page.layout.from, page.layout.to]; },
  get hovered() { return page.hovered && { ...page.hovered, timeline: page.hovered.timeline.number }; },
  get selected() { return page.selected && [page.selected.timeline.number, page.selected.cell]; },
  get chain() { return page.selected?.chain ?? []; },
  get dependents() { return page.selected?.dependents ?? []; },
  get critical() { return page.paths; },
  get shown() { return { ...page.shown }; },
  get focused() { return page.focus.item && { ...page.focus.item, timeline: page.focus.item.timeline.number }; },
  get drawn() { return { ...page.drawn }; },
  get bar() { return page.layout.bar; },
  columnAt(number, rank, time) {
    const { columns } = page.layout.rowOf(page.timelines[number], rank);
    const column = columns.columnAt(time);
    return { begin: columns.begin(column), end: columns.begin(column + 1), left: columns.edge(column), right: columns.edge(column + 1) };
  },
  placeOf(number, cell) {
    const timeline = page.timelines[number];
    const { left, top } = page.canvas.getBoundingClientRect();
    const middle = (timeline.start[cell] + timeline.end[cell]) / 2;
    const row = page.layout.rowOf(timeline, timeline.rank[cell]);
    return [left + page.layout.x(middle), top + row.top + page.layout.bar / 2 - page.stage.scrollTop];
  },
};
