// Draws the blocks of a row: what its rank runs, and why it is idle.

/** Draw everything that a rank runs and waits for; what is too narrow to be seen is drawn in columns. */
function drawRow(canvas, row, styles) {
  const columns = new Columns(canvas, row.timeline, styles.length + canvas.causes.length);
  row.columns = columns;
  const waits = waitsOf(row, styles.length);
  const runs = runsOf(row);
  columns.gather(waits);
  columns.gather(runs);
  columns.drawWide(waits, (place, left, width) => drawWait(canvas, row, row.timeline.waits.cause[place], left, width));
  columns.drawWide(runs, (place, left, width) => drawRun(canvas, row, styles, runs.cell[place], left, width));
  columns.eachUsed(columns.from, columns.to, (column) => drawColumn(canvas, row, styles, column));
  drawMarks(canvas, row, styles);
}

/** The idle intervals of a row; their kinds follow those of the styles. */
function waitsOf({ timeline, rank }, styles) {
  const { first, start, end, cause } = timeline.waits;
  return { start, end, begin: first[rank], stop: first[rank + 1], kindOf: (place) => styles + cause[place] };
}

function runsOf({ timeline, rank }) {
  const { cell, start, end } = timeline.rows[rank].blocks;
  return { cell, start, end, begin: 0, stop: cell.length, kindOf: (place) => timeline.style[cell[place]] };
}

function drawWait(canvas, row, cause, left, width) {
  const { context, layout, brushes, drawn } = canvas;
  context.fillStyle = brushes.patterns[cause];
  context.fillRect(left, row.top, width, layout.bar);
  drawn.waits++;
  drawCause(canvas, row, canvas.causes[cause], left, width);
}

/** Write the cause of idle time on its hatch, where there is room. */
function drawCause(canvas, row, word, left, width) {
  const { context, layout, brushes } = canvas;
  const wide = canvas.widthOf(word) + 8;
  if (layout.bar < 18 || wide + 8 > width) return;
  context.fillStyle = brushes.paper;
  context.beginPath();
  context.roundRect(left + (width - wide) / 2, row.top + layout.bar / 2 - 8, wide, 16, 3);
  context.fill();
  context.fillStyle = brushes.ink;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(word, left + width / 2, row.top + layout.bar / 2 + 0.5);
  canvas.drawn.causes++;
}

function drawRun(canvas, row, styles, cell, left, width) {
  const { timeline } = row;
  const style = styles[timeline.style[cell]];
  drawBlock(canvas, row, style, left, width);
  if (width > 8) drawLabel(canvas, row, style, cell, left, width);
}

function drawBlock({ context, layout, drawn }, row, style, left, width) {
  context.fillStyle = style.colour;
  const inset = row.columns.spaced && width > 3 ? 1 : 0;
  context.beginPath();
  context.roundRect(left, row.top, width - inset, layout.bar, inset && Math.min(width / 3, 2.5));
  context.fill();
  drawn.blocks++;
}

/** Draw actions that take no time as small triangles that point at their time, one for all at the same place. */
function drawMarks(canvas, row, styles) {
  const { layout } = canvas;
  const { timeline, rank } = row;
  const { cell, start } = timeline.rows[rank].marks;
  let last = -Infinity;
  for (let place = Math.max(firstAbove(start, layout.from) - 1, 0); place < cell.length && start[place] <= layout.to; place++) {
    const x = layout.x(start[place]);
    if (x - last < 4) continue;
    last = x;
    drawMark(canvas, row, styles[timeline.style[cell[place]]], x);
  }
}

/** Above the bar, so that it hides nothing. */
function drawMark({ context, drawn }, row, style, x) {
  context.fillStyle = style.colour;
  context.beginPath();
  context.moveTo(x - 4, row.top - 6);
  context.lineTo(x + 4, row.top - 6);
  context.lineTo(x, row.top);
  context.fill();
  drawn.blocks++;
}
