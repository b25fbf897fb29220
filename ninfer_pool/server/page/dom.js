// Makes and changes elements. Data becomes text nodes and attributes only, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with attributes (`null` and `false` leave one out) and children. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same for a drawing. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) attribute(node, name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Set an attribute where it changes; `null` and `false` remove it. */
export function attribute(node, name, value) {
  if (value === null || value === false || value === undefined) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Set text where it changes, so that a reader's selection and a screen reader stay undisturbed. */
export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export function show(node, shown) {
  if (node.hidden === shown) node.hidden = !shown;
}

/** Replace the children of `node` where `signature` differs from the last one. */
export function redraw(node, signature, children) {
  if (node.drawn === signature) return;
  node.drawn = signature;
  node.replaceChildren(...children());
}

/**
 * Children of `parent`, one for each item, that stay the same elements while their key stays:
 * what a person has focused, opened or selected survives an update.
 */
export class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make; // (key) -> {nodes, update(item)}
    this.rows = new Map();
  }

  update(items, keyOf) {
    const keys = new Set(items.map(keyOf));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.nodes.forEach((node) => node.remove());
        this.rows.delete(key);
      }
    }
    let next = this.parent.firstChild;
    for (const item of items) {
      const key = keyOf(item);
      if (!this.rows.has(key)) this.rows.set(key, this.make(key));
      const row = this.rows.get(key);
      for (const node of row.nodes) {
        if (node === next) next = next.nextSibling;
        else this.parent.insertBefore(node, next);
      }
      row.update(item);
    }
  }
}
