// The blocks of a row: what its rank runs, and why it is idle. What is narrower than a pixel is drawn as shares of one.

/** How wide the columns are into which narrow blocks are gathered. */
const COLUMN = 2;

/** Narrow blocks, gathered column by column: how long each kind runs there. */
class Column {
  constructor(kinds, left) {
    this.left = left;
    this.total = new Float64Array(kinds);
    this.x = NaN;
  }

  /** Add to the column at x; what the one before holds is drawn first. */
  add(x, kind, time, draw) {
    const column = this.left + Math.floor((x - this.left) / COLUMN) * COLUMN;
    if (column !== this.x) this.flush(draw, column);
    this.total[kind] += time;
  }

  flush(draw, next = NaN) {
    if (!Number.isNaN(this.x)) draw(this.x, this.total);
    this.total.fill(0);
    this.x = next;
  }
}

/** Call `wide` for each interval in view that can be seen, and `narrow` for columns of those that cannot. */
function drawIntervals(layout, { start, end, begin, stop, kindOf, kinds }, wide, narrow) {
  const column = new Column(kinds, layout.left);
  let place = Math.max(firstAbove(start, layout.from, begin, stop) - 1, begin);
  for (; place < stop && start[place] <= layout.to; place++) {
    if (end[place] < layout.from) continue;
    const x = layout.x(start[place]);
    const width = (end[place] - start[place]) * layout.scale;
    if (width >= 1) wide(place, x, width);
    else column.add(x, kindOf(place), end[place] - start[place], narrow);
  }
  column.flush(narrow);
}

/** The part of an interval that is in view, on whole pixels of the device. */
function onPixels(layout, x, width, density) {
  const left = Math.max(Math.round(x * density) / density, layout.left - 4);
  const right = Math.min(Math.round((x + width) * density) / density, layout.width);
  return [left, Math.max(right - left, 0)];
}

function drawWaits({ context, layout, brushes, density, drawn }, row) {
  const { first, start, end, cause } = row.timeline.waits;
  const facts = { start, end, begin: first[row.rank], stop: first[row.rank + 1], kindOf: (place) => cause[place], kinds: brushes.causes.length };
  const fill = (kind, left, width) => {
    context.fillStyle = brushes.patterns[kind];
    context.fillRect(left, row.top, width, layout.bar);
    drawn.waits++;
  };
  const wide = (place, x, width) => fill(cause[place], ...onPixels(layout, x, width, density));
  const narrow = (x, total) => fill(total.indexOf(Math.max(...total)), x, COLUMN);
  drawIntervals(layout, facts, wide, narrow);
}

function drawBlocks(canvas, row, looks) {
  const { context, layout, density, drawn } = canvas;
  const { timeline, rank } = row;
  const { cell, start, end } = timeline.rows[rank].blocks;
  const facts = { start, end, begin: 0, stop: cell.length, kindOf: (place) => timeline.look[cell[place]], kinds: looks.length };
  const wide = (place, x, width) => {
    const [left, seen] = onPixels(layout, x, width, density);
    drawBlock(canvas, row, looks[timeline.look[cell[place]]], left, seen);
    if (seen > 15) drawLabel(canvas, row, looks[timeline.look[cell[place]]], timeline.name[cell[place]], left, seen);
  };
  const narrow = (x, total) => {
    let bottom = row.top + layout.bar;
    for (let kind = 0; kind < total.length; kind++) {
      if (!total[kind]) continue;
      const height = Math.min(layout.bar * total[kind] * layout.scale / COLUMN, bottom - row.top);
      context.fillStyle = looks[kind].colour;
      context.fillRect(x, bottom - height, COLUMN, height);
      bottom -= height;
      drawn.blocks++;
    }
  };
  drawIntervals(layout, facts, wide, narrow);
  drawMarks(canvas, row, looks);
}

function drawBlock({ context, layout, drawn }, row, look, left, width) {
  context.fillStyle = look.colour;
  if (width > 7) {
    context.beginPath();
    context.roundRect(left, row.top, width - 1, layout.bar, 2.5);
    context.fill();
  } else {
    context.fillRect(left, row.top, width > 3 ? width - 1 : width, layout.bar);
  }
  drawn.blocks++;
}

/** The action in its block, if it fits: an overlap in two lines if they do. */
function drawLabel(canvas, row, look, name, left, width) {
  const { context, layout } = canvas;
  const parts = name.startsWith("(") ? name.slice(1, name.indexOf(")")).split(";") : [name];
  const lines = layout.bar >= 14 * parts.length ? parts : [parts.join(" ")];
  const widest = Math.max(...lines.map((line) => canvas.widthOf(line)));
  if (widest > width - 5 || layout.bar < 12) return;
  context.fillStyle = look.ink;
  context.textAlign = "center";
  context.textBaseline = "middle";
  lines.forEach((line, number) => {
    const middle = row.top + layout.bar / 2 + 13 * (number - (lines.length - 1) / 2) + 0.5;
    context.fillText(line, left + (width - 1) / 2, middle);
    canvas.drawn.labels++;
  });
}

/** What takes no time: a small triangle that points at its moment, one for all in the same place. */
function drawMarks(canvas, row, looks) {
  const { layout } = canvas;
  const { timeline, rank } = row;
  const { cell, start } = timeline.rows[rank].marks;
  let last = -Infinity;
  for (let place = Math.max(firstAbove(start, layout.from) - 1, 0); place < cell.length && start[place] <= layout.to; place++) {
    const x = layout.x(start[place]);
    if (x - last < 4) continue;
    last = x;
    drawMark(canvas, row, looks[timeline.look[cell[place]]], x);
  }
}

/** It stands above the bar, so that it hides nothing there. */
function drawMark({ context, drawn }, row, look, x) {
  context.fillStyle = look.colour;
  context.beginPath();
  context.moveTo(x - 4, row.top - 6);
  context.lineTo(x + 4, row.top - 6);
  context.lineTo(x, row.top);
  context.fill();
  drawn.blocks++;
}
