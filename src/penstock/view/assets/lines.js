// Draws what goes from row to row: transfers, and chains of what waited for what.

/** How strongly transfers in view are drawn: if they are too close to follow, not at all. */
function transferStrength(layout, { transfers, ranks }) {
  const inView = firstAbove(transfers.start, layout.to) - firstAbove(transfers.start, layout.from);
  const apart = (ranks * (layout.right - layout.left)) / Math.max(inView, 1);
  return clamp((apart - 4) / 12, 0, 0.7);
}

/** Draw the transfers in view; of those between the same two ranks that start in the same pixels, only one. */
function drawTransfers({ context, layout, brushes, drawn, rows }, timeline) {
  const { source, target, start, end, forward } = timeline.transfers;
  const strength = transferStrength(layout, timeline);
  if (!strength) return;
  const paths = [new Path2D(), new Path2D()];
  const last = new Map();
  let place = firstAbove(start, layout.from - timeline.longestTransfer);
  for (; place < start.length && start[place] <= layout.to; place++) {
    const from = rows.get(source[place] + timeline.number * 1e6);
    const to = rows.get(target[place] + timeline.number * 1e6);
    if (!from && !to) continue;
    const x = layout.x(start[place]);
    const pair = (source[place] * timeline.ranks + target[place]) * 2 + forward[place];
    if (x - (last.get(pair) ?? -Infinity) < 3) continue;
    last.set(pair, x);
    const [outset, arrival] = edges(layout, timeline, source[place], target[place]);
    paths[forward[place]].moveTo(x, outset);
    paths[forward[place]].lineTo(layout.x(end[place]), arrival);
    drawn.transfers++;
  }
  context.lineWidth = 1;
  context.globalAlpha *= strength;
  [brushes.backward, brushes.forward].forEach((colour, number) => {
    context.strokeStyle = colour;
    context.stroke(paths[number]);
  });
}

/** The transfer whose line is within a reach of a place, or -1; the height is that of the rows. */
function transferAt(layout, timeline, x, height, reach) {
  const { source, target, start, end } = timeline.transfers;
  if (!transferStrength(layout, timeline)) return -1;
  let place = firstAbove(start, layout.time(x - reach) - timeline.longestTransfer);
  for (; place < start.length && layout.x(start[place]) <= x + reach; place++) {
    const [outset, arrival] = edges(layout, timeline, source[place], target[place]);
    const share = (height - outset) / (arrival - outset);
    if (share < 0 || share > 1) continue;
    if (Math.abs(layout.x(start[place] + share * (end[place] - start[place])) - x) <= reach) return place;
  }
  return -1;
}

/** The heights at which a line leaves one row and enters another: the edges of their bars that face each other. */
function edges(layout, timeline, source, target) {
  const from = layout.rowOf(timeline, source).top;
  const to = layout.rowOf(timeline, target).top;
  return from < to ? [from + layout.bar, to] : [from, to + layout.bar];
}

/** Draw a chain in full colour with a frame around each block, and lines from rank to rank. */
function drawChain(canvas, timeline, chain, colour, styles) {
  const { context, layout } = canvas;
  const path = new Path2D();
  const lit = new Set();
  let before = -1;
  for (const cell of chain) {
    if (timeline.posted[cell]) continue;
    if (before >= 0 && timeline.end[cell] >= layout.from && timeline.start[before] <= layout.to) joinBlocks(layout, timeline, before, cell, path);
    before = cell;
    const row = canvas.rows.get(timeline.rank[cell] + timeline.number * 1e6);
    if (!row || timeline.end[cell] < layout.from || timeline.start[cell] > layout.to) continue;
    drawLit(canvas, row, styles, cell, colour, lit);
  }
  context.strokeStyle = colour;
  context.lineWidth = 1.75;
  context.stroke(path);
}

function joinBlocks(layout, timeline, one, other, path) {
  const [from, to] = [timeline.rank[one], timeline.rank[other]];
  const end = layout.x(timeline.end[one]);
  const start = layout.x(timeline.start[other]);
  if (from !== to) {
    const [outset, arrival] = edges(layout, timeline, from, to);
    path.moveTo(end, outset);
    path.lineTo(start, arrival);
  } else if (start - end > 2) {
    const middle = layout.rowOf(timeline, from).top + layout.bar / 2;
    path.moveTo(end, middle);
    path.lineTo(start, middle);
  }
}

/** Draw an action in full colour: a mark if it takes no time, a framed block, or each column that it is in, once. */
function drawLit(canvas, row, styles, cell, colour, lit, dashes = []) {
  const { timeline, columns } = row;
  const [start, end] = [timeline.start[cell], timeline.end[cell]];
  if (end <= start) return drawMark(canvas, row, styles[timeline.style[cell]], canvas.layout.x(start));
  columns.eachUsed(start, end, (column) => {
    const place = `${timeline.number} ${row.rank} ${column}`;
    if (!lit.has(place)) drawColumn(canvas, row, styles, column);
    lit.add(place);
  });
  const [left, width] = end - start < columns.narrow ? [0, 0] : columns.part(start, end);
  return width > 0 && drawFramed(canvas, row, styles, cell, left, width, colour, dashes);
}

function drawFramed(canvas, row, styles, cell, left, width, colour, dashes) {
  const { context, layout } = canvas;
  drawRun(canvas, row, styles, cell, left, width);
  if (width <= 3) return;
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.setLineDash(dashes);
  context.strokeRect(left, row.top, width - 1, layout.bar);
  context.setLineDash([]);
}

/** Draw a second frame around the selected action. */
function drawRing({ context, layout, brushes, rows }, timeline, cell) {
  const row = rows.get(timeline.rank[cell] + timeline.number * 1e6);
  if (!row) return;
  const length = timeline.end[cell] - timeline.start[cell];
  const left = layout.x(timeline.start[cell]) - (length ? 5 : 7);
  const width = length ? length * layout.scale + 9 : 14;
  const height = length ? layout.bar + 8 : 10;
  context.strokeStyle = brushes.critical;
  context.lineWidth = 2.5;
  context.beginPath();
  context.roundRect(left, row.top - (length ? 4 : 9), width, height, 5);
  context.stroke();
}

/** Draw what waits for the selected action, each with a dashed frame and a dashed line to it. */
function drawDependents(canvas, timeline, cell, dependents, styles) {
  const { context, layout, brushes } = canvas;
  const path = new Path2D();
  const lit = new Set();
  for (const other of dependents) {
    joinBlocks(layout, timeline, cell, other, path);
    const row = canvas.rows.get(timeline.rank[other] + timeline.number * 1e6);
    if (!row || timeline.end[other] < layout.from || timeline.start[other] > layout.to) continue;
    drawLit(canvas, row, styles, other, brushes.ink, lit, [4, 3]);
  }
  context.strokeStyle = brushes.ink;
  context.lineWidth = 1.25;
  context.setLineDash([4, 3]);
  context.stroke(path);
  context.setLineDash([]);
}
