// Draws the memory of each rank: a step curve under its row, all on one scale.

/** The highest value that the curves show: the peak of any rank, or the limit. */
function memoryScale(timelines, limit) {
  return Math.max(limit ?? 0, ...timelines.flatMap((timeline) => timeline.peaks), Number.MIN_VALUE);
}

function drawMemory(canvas, row, most, limit) {
  const { context, layout, brushes } = canvas;
  const bottom = row.curve + layout.curve;
  const y = (value) => bottom - (layout.curve - 3) * (value / most);
  const points = curvePoints(canvas, row, y);
  context.fillStyle = brushes["held-fill"];
  trace(context, points);
  context.lineTo(points[points.length - 2], bottom);
  context.lineTo(points[0], bottom);
  context.fill();
  if (limit !== null && row.timeline.peaks[row.rank] > limit) drawExcess(canvas, points, row.curve, y(limit));
  context.strokeStyle = brushes.held;
  context.lineWidth = 1;
  trace(context, points);
  context.stroke();
  if (limit !== null) drawLimit(canvas, y(limit));
  drawPeak(canvas, row, y);
}

/** The corners of the curve in view, x and y alternating; of many in one pixel, the highest counts. */
function curvePoints({ layout, drawn }, row, y) {
  const { time, value } = row.timeline.memory[row.rank];
  const left = Math.max(layout.left - 4, layout.x(0));
  const right = Math.min(layout.width, layout.x(row.timeline.makespan));
  let place = Math.max(firstAbove(time, layout.time(left)) - 1, 0);
  let height = y(value[place]);
  const points = [left, height];
  for (place++; place < time.length; ) {
    const x = layout.x(time[place]);
    if (x > right) break;
    const before = height;
    let highest = height;
    for (; place < time.length && layout.x(time[place]) < x + 1; place++) {
      height = y(value[place]);
      highest = Math.min(highest, height);
    }
    points.push(x, before);
    if (highest < before) points.push(x, highest);
    points.push(x, height);
    drawn.points++;
  }
  points.push(Math.max(right, left), height);
  return points;
}

function trace(context, points) {
  context.beginPath();
  for (let place = 0; place < points.length; place += 2) context.lineTo(points[place], points[place + 1]);
}

/** Draw what is above the limit in the warning colour. */
function drawExcess({ context, layout, brushes }, points, top, height) {
  context.save();
  context.beginPath();
  context.rect(0, top - 2, layout.width, height - top + 2);
  context.clip();
  context.fillStyle = brushes.warning;
  trace(context, points);
  context.lineTo(points[points.length - 2], height);
  context.lineTo(points[0], height);
  context.fill();
  context.restore();
}

function drawLimit({ context, layout, brushes }, height) {
  context.strokeStyle = brushes.warning;
  context.lineWidth = 1;
  context.globalAlpha = 0.75;
  context.setLineDash([4, 4]);
  context.beginPath();
  context.moveTo(layout.left - 4, Math.round(height) + 0.5);
  context.lineTo(layout.width, Math.round(height) + 0.5);
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 1;
}

/** Draw a dot where the curve first reaches its peak. */
function drawPeak({ context, layout, brushes }, row, y) {
  const { time, value } = row.timeline.memory[row.rank];
  const peak = row.timeline.peaks[row.rank];
  row.peakPlace ??= value.findIndex((held) => held >= peak * (1 - 1e-9));
  if (row.peakPlace < 0) return;
  const x = layout.x(time[row.peakPlace]);
  if (x < layout.left || x > layout.right + 10) return;
  context.fillStyle = brushes.ink;
  context.beginPath();
  context.arc(x + 1, y(value[row.peakPlace]), 2.5, 0, 2 * Math.PI);
  context.fill();
}
