// Colours and patterns. Theme colours are variables of the style sheet; idle time is hatched, differently for each cause.

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif';

/** The strokes of each hatch in a square of 8 by 8, which is repeated. */
const HATCHES = {
  activation: [[-2, 10, 10, -2], [-2, 2, 2, -2], [6, 10, 10, 6]],
  gradient: [[-2, -2, 10, 10], [6, -2, 10, 2], [-2, 6, 2, 10]],
  transfer: [[0, 2, 8, 2], [0, 6, 8, 6]],
  unsent: [[-1, 7, 4, 2], [4, 2, 9, 7]],
  lane: [[-2, 10, 10, -2], [-2, -2, 10, 10]],
  order: [[-2, 10, 10, -2], [-2, 2, 2, -2], [6, 10, 10, 6], [-2, 6, 6, -2], [2, 10, 10, 2]],
  dispatch: [[2, 0, 2, 8], [6, 0, 6, 8]],
  sends: [[0, 0, 4, 4], [4, 4, 8, 0], [0, 8, 4, 4], [4, 4, 8, 8]],
  step: [[0, 4, 8, 4], [4, 0, 4, 8]],
  drained: [[1, 2, 3, 2], [5, 6, 7, 6]],
};

class Brushes {
  constructor(causes) {
    this.causes = causes;
    this.patterns = [];
  }

  /** Read the colours of the theme again, and draw the hatches in them. */
  refresh(context, density) {
    const style = getComputedStyle(document.documentElement);
    const names = ["paper", "raised", "ink", "muted", "line", "grid", "accent", "warning", "held", "held-fill", "critical", "forward", "backward"];
    for (const name of names) this[name] = style.getPropertyValue(`--${name}`).trim();
    this.waits = this.causes.map((cause) => style.getPropertyValue(`--wait-${cause}`).trim());
    this.patterns = this.causes.map((cause, number) => hatched(context, density, cause, this.waits[number]));
  }
}

function hatched(context, density, cause, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(8 * density);
  const strokes = tile.getContext("2d");
  const scale = tile.width / 8;
  strokes.scale(scale, scale);
  strokes.globalAlpha = 0.14;
  strokes.fillStyle = colour;
  strokes.fillRect(0, 0, 8, 8);
  strokes.globalAlpha = 0.75;
  strokes.strokeStyle = colour;
  strokes.beginPath();
  for (const [fromX, fromY, toX, toY] of HATCHES[cause]) {
    strokes.moveTo(fromX, fromY);
    strokes.lineTo(toX, toY);
  }
  strokes.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}
